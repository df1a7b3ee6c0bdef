"""The parts of bodies that all protocols share: strictness, fields of every request, conversations, tools, usage."""
