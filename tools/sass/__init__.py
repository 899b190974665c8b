"""Read GPU machine code (SASS) without a GPU.

``code`` parses a disassembly. ``loops`` finds its natural loops. ``counts`` counts the instructions of one iteration of
the main loop and bounds its time.
"""
