"""fastft inside other compilers and registries; each imports its library when it is imported itself."""
