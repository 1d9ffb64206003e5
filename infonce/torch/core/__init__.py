"""What the functions and modules of `infonce.torch` rest on: nodes of autograd's graph, the
operator of compiled graphs, process groups, and the base of losses in the place of other projects'.
"""
