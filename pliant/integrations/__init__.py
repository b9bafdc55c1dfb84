"""Other people's training loops: one module each, thin, standing on `Session`. Import the module that you need."""
