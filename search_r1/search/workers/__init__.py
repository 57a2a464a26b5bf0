"""One service in several processes: front ends speak HTTP, the owner holds the index and searches."""
