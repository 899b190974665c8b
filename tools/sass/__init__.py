"""Read GPU machine code (SASS) without a GPU.

``code`` parses a disassembly, ``loops`` finds its natural loops, ``counts`` counts what one iteration of the main loop
issues and which bound that puts on its time.
"""
