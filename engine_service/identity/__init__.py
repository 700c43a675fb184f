"""Who may ask for what: tokens, what each is bound to, and how a new client gets one. Knows no HTTP."""
