"""Users' reward functions: loads them from the file that a recipe names and calls them in a killable process."""
