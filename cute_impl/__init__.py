"""CuTe DSL kernels for sm_90a, one module (or package) a kernel. Importing this needs no GPU."""
