"""How is it driven? One module a subcommand: its arguments, and what it prints."""
