"""The C++ kernels against plain float64 NumPy."""
