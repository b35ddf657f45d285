"""One operation a file: essay, Triton kernels, a short launcher with `out=`, and its plain-torch twin."""
