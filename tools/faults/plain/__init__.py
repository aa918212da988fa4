"""Right kernels in plain torch, what else a right kernel may do, and single mistakes that authors of kernels make.

Written from the interfaces alone, without a look at the goldens: what the judge refuses of them is a measurement.
"""
