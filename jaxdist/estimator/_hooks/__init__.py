"""Hooks: user code that runs around training, evaluation and prediction."""

from jaxdist.estimator._hooks.chain import HookChain as HookChain
from jaxdist.estimator._hooks.chain import NameFailure as NameFailure
from jaxdist.estimator._hooks.chain import check_hooks as check_hooks
from jaxdist.estimator._hooks.hook import SessionRunContext as SessionRunContext
from jaxdist.estimator._hooks.hook import SessionRunHook as SessionRunHook
from jaxdist.estimator._hooks.hook import SessionRunValues as SessionRunValues
from jaxdist.estimator._hooks.listener import CheckpointSaverListener as CheckpointSaverListener
from jaxdist.estimator._hooks.session import Session as Session
