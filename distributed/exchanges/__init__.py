"""Exchanges, by which ranks get each other's keys, and the choice between them."""
