"""All-reduce algorithms: functions of a vector and of the groups of replicas that communicate."""
