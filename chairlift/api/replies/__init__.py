"""What all protocols share of replies: their interface, how an answer is read, and scores."""
