"""Below the functions and modules of `infonce.torch`: nodes of autograd's graph, the operator of
compiled graphs, repeated calls, process groups, and the base class of drop-in replacements.
"""
