"""From a trained model to files: adapters, merged checkpoints, GGUF; every save is checked before it takes its place."""
