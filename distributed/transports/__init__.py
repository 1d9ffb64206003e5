"""How arrays get to the next rank: the transports, and which of them a call takes."""
