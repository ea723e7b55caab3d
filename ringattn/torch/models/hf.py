"""Models of the transformers library over sequences that are spread over ranks, in loops and trainers of all kinds."""

from ringattn.torch.models.hf_accelerate import over_ranks
from ringattn.torch.models.hf_generate import RanksCache
from ringattn.torch.models.hf_model import plan_of, prepare, prepared, unprepare, whole
from ringattn.torch.models.hf_trainer import OverRanks

__all__ = ["OverRanks", "RanksCache", "over_ranks", "plan_of", "prepare", "prepared", "unprepare", "whole"]
