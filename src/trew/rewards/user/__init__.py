"""Users' reward functions: loaded from the file that a recipe names, called in a process that can be ended."""
