"""What is checked of a call before any work: the whole call (call.py), its arguments one by one."""
