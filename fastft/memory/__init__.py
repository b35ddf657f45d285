"""Where a step's activations live: how much memory there is, what each layer keeps, and a store in host memory."""
