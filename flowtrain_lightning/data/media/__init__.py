"""Files of images, videos and audio, and what an encoder gets of them."""
