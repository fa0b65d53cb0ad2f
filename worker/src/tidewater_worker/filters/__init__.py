"""Which messages a subscription wants: one meaning, for messages in memory, log and table.

conditions   what can be asked of a message; answered row by row, or for many rows by bounds  (pure)
where        `filter.where`: the words of SQL, read into conditions                           (pure)
wanted       a Subscription's `filter` as one condition, and the rows that meet it            (pure)
"""
