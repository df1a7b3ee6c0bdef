"""Plan -> tensors -> tokens -> text: the runner, sampling, the text side, and the thread that drives them."""
