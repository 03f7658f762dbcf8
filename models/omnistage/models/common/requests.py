"""The old place of names of `omnistage.models.requests`, for one more version: import them from `omnistage.models.kit`."""

from omnistage.models.requests import check_bias as check_bias
from omnistage.models.requests import check_constraint as check_constraint
from omnistage.models.requests import check_medium as check_medium
from omnistage.models.requests import check_parts as check_parts
from omnistage.models.requests import check_place as check_place
from omnistage.models.requests import check_plain_drawing as check_plain_drawing
from omnistage.models.requests import refuse_unfit as refuse_unfit
