"""trew inside other people's trainers; each room imports its own peer, and only when something of it is used."""
