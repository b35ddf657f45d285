"""From a name to a model: what the name is, where it goes, in which dtype, quantized how, with which adapter."""
