"""What both model services run graphs with: decoder, caches, checkpoints, programs. No grpc."""
