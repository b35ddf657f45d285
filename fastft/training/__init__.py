"""What a training run says and leaves behind: banner, progress, report, checkpoints that resume.

A planned model finds the trainer that trains it (frames.py, watch.py) and gives it one callback (run.py): nothing is
swapped on transformers' or TRL's classes, and `fastft.unpatch(model)` takes it away again.
"""
