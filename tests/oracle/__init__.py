"""An independent textbook implementation of every objective, and the tests that hold the library equal to it."""
