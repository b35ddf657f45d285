"""`fastft bench` and `fastft validate`: speed and memory of the kernels and of whole training steps, measured."""
