"""Hand-derived pairs of pure functions (forward, backward) and the thin autograd Functions around them."""
