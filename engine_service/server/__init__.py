"""HTTP in front of the engine: routes, tokens, streams. Carries messages; decides nothing about service."""
