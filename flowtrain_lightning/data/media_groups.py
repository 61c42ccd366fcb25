"""The groups of a data module's samples: those that have a picture, or another media item, in common."""

from __future__ import annotations

import numpy as np

from flowtrain_lightning.data.data_error import DataError
from flowtrain_lightning.data.sources.sample_source import JoinedSources
from flowtrain_lightning.packing import PackingError
from flowtrain_lightning.packing.media_groups import MediaGroups


def media_groups_of(source: JoinedSources) -> MediaGroups:
    """Those of all samples.

    Raises:
        DataError: it is not known of any two samples that they have one in common.
    """
    try:
        return MediaGroups.of_sizes(source.sizes(np.arange(len(source), dtype=np.int64)))
    except PackingError as error:
        raise DataError(str(error)) from None
