"""What talks to a GPU: launches, structures, compilation, libraries. It knows no loss."""
