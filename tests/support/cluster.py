"""The real Valkey Cluster of the tests; it is public."""

from perdure.testing.valkey import Cluster as Cluster
from perdure.testing.valkey import Node as Node
from perdure.testing.valkey import cluster as cluster
from perdure.testing.valkey import eventually as eventually
