"""The network that an all-to-all runs on: lower bounds, routes and cuts, and the model that times an order."""
