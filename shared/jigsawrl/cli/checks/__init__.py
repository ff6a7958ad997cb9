"""What `jigsaw doctor` looks at: this machine, a daemon's folder, a cluster. Nothing here changes
anything."""
