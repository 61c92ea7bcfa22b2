"""Encoder-decoders and encoders made of decoders."""
