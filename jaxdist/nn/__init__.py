"""Losses and random keys whose values do not depend on the number of replicas."""

from jaxdist.nn._loss import compute_average_loss as compute_average_loss
from jaxdist.nn._loss import scale_regularization_loss as scale_regularization_loss
from jaxdist.nn._random import example_keys as example_keys
