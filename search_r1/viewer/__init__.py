"""View stored trajectories in a browser, to find out why one of them got its reward."""
