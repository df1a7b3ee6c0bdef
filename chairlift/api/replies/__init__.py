"""The parts of replies that all protocols share: their interface, the reading of an answer, and scores."""
