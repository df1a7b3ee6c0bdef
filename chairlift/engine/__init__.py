"""From plans to tensors, tokens and text: the runner, sampling, text processing, and the thread that drives them."""
