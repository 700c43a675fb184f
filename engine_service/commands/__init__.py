"""The commands that look: plan, models, policy check, config init, doctor, top. None of them serves."""
