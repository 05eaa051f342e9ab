"""Who makes which fetch of an epoch, and in which order their minibatches come. Knows nothing of Ray."""
