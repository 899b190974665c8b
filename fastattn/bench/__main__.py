import argparse
import sys

from fastattn import bench

parser = argparse.ArgumentParser("python -m fastattn.bench", description=bench.__doc__)
bench.add_arguments(parser)
sys.exit(bench.main(parser.parse_args()))
