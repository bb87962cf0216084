"""What a run takes of each rank's memory: predicted from its configuration, and tracked."""
