"""What a kernel costs a GPU, read from its machine code (SASS), with no GPU: predictions, not measurements.

``code`` reads a disassembly, ``loops`` finds its natural loops, ``cost`` counts what an iteration needs of each pipe,
``simulation`` issues it in order, ``rates`` holds what is known of the machines. ``public`` has kernels whose speed is
published: what the model says of them is held to that. ``native`` has the CUDA C++ kernels for rows.
"""
