"""The device path: both ends of the protocol where kernels do a request's work; see its page."""
