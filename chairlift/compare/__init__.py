"""`chairlift compare`: how far the next-token probabilities of one model are from those of another."""
