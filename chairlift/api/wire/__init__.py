"""What all protocols share of bodies: strictness, fields of every request, conversations, tools, errors and usage."""
