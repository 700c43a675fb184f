"""Rehearsals of a policy in virtual time, with the scheduler that the engine runs."""
