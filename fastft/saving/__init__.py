"""From a trained model to files: adapters, merged checkpoints, GGUF; a save is checked before it takes its place."""
